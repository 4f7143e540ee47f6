"""A norm and SiLU in one pass, for video decoders: RMSNorm over the channels, pixel norm, group norm."""
