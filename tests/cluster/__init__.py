"""A package, so that its conftest.py and that of tests/ are two modules."""
