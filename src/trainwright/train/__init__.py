"""What runs inside the workers; nothing imports it, it is started as `python -m trainwright.train`."""
