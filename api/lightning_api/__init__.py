"""The service: the Agent Lightning store protocol over HTTP, on any `LightningStore`."""
