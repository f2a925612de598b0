"""From anybody's records to batches: sources, schema, chat, blend, datasets, collate, loader, preview."""
