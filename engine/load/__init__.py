"""From a folder or a hub id to a model: files, names, quantised layouts."""
