"""What crosses the bundle file: manifest, KV plan, schedule, tensor specs, errors, container bytes."""
