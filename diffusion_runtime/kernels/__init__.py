"""Operations that have several implementations: semantics in `api`, the specification in `reference`."""
