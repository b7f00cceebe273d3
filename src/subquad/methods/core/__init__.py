"""What all methods are made of: the base class, settings, traits, the registry, the grammar of texts."""
