"""`strata fleet`: a real fleet on Flower, without its sharp edges.

keys, certificates      who may talk to whom
environment, addresses  what every process we start is told, and where it listens
app                     the one bundle that runs: it names Strata's own apps and holds no code
guard, superlink        the server's process: Flower's SuperLink behind a door
supernode               the device's process: Flower's SuperNode that runs nothing but Strata
children                starting processes and ending them again
server, device, submitting, status, control     what the commands do

Nothing here imports torch, and Flower only where it is needed: a device's memory is for training.
"""
