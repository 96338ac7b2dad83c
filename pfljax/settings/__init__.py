"""How settings are declared, checked, recorded and searched: fields, methods' registry, grids, users' own files."""
