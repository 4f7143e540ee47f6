"""SeedVR2: restoration and upscaling of videos and images in one step."""
