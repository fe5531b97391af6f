"""Which models are shipped inside the package? The embedded panel: tiny, trained, of the paper's
architectures."""
