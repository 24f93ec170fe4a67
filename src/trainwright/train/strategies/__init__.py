"""How ranks share the work: one interface, one module a way."""
