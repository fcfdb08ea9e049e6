"""specops inside other libraries. Each module needs its library installed, and nothing here is imported by the rest."""
