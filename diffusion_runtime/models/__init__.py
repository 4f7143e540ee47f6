"""Model families: their folders, transformers and latent decoders, behind one interface."""
