"""Settings: declared sections, one reader of files and environment, the built-in ladder."""
