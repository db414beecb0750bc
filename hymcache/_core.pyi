"""The C++ core. Errors are those of hymcache.errors; long calls release the GIL."""
