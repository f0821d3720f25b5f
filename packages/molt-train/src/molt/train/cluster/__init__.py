"""The only importer of ray: runtime, actor ranks, engines, payload store, and the weight-sync client between them."""
