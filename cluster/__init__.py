"""The edge: the only package that imports Ray. Services, client and command line."""
