"""Save everything that training needs to continue, and load it again on any number of ranks."""
