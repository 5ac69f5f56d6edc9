"""Examples that are part of the package: `understudy run` is one of them."""
