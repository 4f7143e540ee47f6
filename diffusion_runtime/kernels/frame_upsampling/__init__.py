"""Upsampling of a video decoder: twice the height and width, twice the frames, and the shortcut around it."""
