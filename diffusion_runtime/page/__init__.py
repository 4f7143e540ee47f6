"""The page of `serve`, and the components that it shares with the pages of `explain` and `compare`."""
