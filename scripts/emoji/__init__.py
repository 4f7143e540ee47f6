"""The world of the embedded model `emoji`: pictures of Noto Color Emoji on drawn scenes, rendered on the device."""
