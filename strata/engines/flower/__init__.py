"""Device work on a real fleet: the server pushes jobs through Flower's Grid, devices train in a capped child process.

settings            what a device and a run are told (node config and run config)
codec, envelope     a submodel as one flat array with a JSON header; nothing else travels
server_app, conducting, post, roster, levels, engine, surveying     the server's side
client_app, keeper, workshop, bench, capped, frozen, holding, limits     the device's side
"""
