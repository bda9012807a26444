"""Other packages' interfaces, as thin layers over tilewise: change an import and the code runs."""
