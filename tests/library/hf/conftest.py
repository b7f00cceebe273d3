import tests.libraries  # noqa: F401
