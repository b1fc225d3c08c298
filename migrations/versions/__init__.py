"""One reversible step per file, in the order of ``down_revision``."""
