"""What travels between server and devices: settings (node and run config), and a submodel as one flat array (codec)."""
