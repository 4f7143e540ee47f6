"""Kernels with several implementations: the semantics in `api`, the specification in `reference`, fast ones in Triton
or CuTe."""
