"""Contract tests and worked examples that ship with the package, for those who extend it."""
