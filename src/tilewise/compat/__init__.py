"""Drop-in interfaces of other packages, as thin layers over tilewise: change an import and the code runs."""
