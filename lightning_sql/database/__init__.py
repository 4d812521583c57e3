"""Everything that is SQL but not meaning: tables, engines, dialects, payloads, migrations."""
