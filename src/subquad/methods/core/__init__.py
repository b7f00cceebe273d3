"""The parts of all methods: the base class, settings, traits, the registry, the grammar of texts."""
