"""One thin file per command; `render` is the only module that writes to a stream."""
