"""MiniMax-H3: video with sound from text, images, videos and sounds, as one packed sequence."""
