"""From noise to latents: the noise, the samplers that own the loop, and guidance around the prediction."""
