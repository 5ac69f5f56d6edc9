"""Examples that are part of the package: `make demo` shows one of them."""
