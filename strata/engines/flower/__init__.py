"""Device work on a real fleet: the server pushes jobs through Flower's Grid, devices train in a capped child process.

settings     what a device and a run are told (node config and run config)
codec        a submodel as one flat array and a JSON spec; nothing else travels
server_app, engine, roster, judging     the server's side
client_app, keeper, work, cache         the device's side
"""
