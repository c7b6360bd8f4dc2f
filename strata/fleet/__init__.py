"""`strata fleet`: a real fleet on Flower, without its sharp edges. Nothing outside this folder touches Flower.

protocol/    what travels: settings of devices and runs, messages as bytes, their place in Flower's messages, failures
security/    keys and certificates (who may talk to whom), their revocation, addresses; before the server's port the
             guard, who signed a request (signatures), what a connection may take (handshakes, connection_limits) and
             what devices may leave with the server (stored_bytes)
server/      `strata fleet server`: its process (superlink), who is admitted (admission)
             `strata fleet run`: handed in (submission), played on the server (server_app, run): who is there (members),
             who joins the run and leaves it (roster), which level each has (levels), messages and answers (messages,
             answer_size, engine), evaluation by devices
             `strata fleet status`, and the control interface that all of them use (control)
device/      `strata fleet device`: its process (supernode), and one that forks an app for each message (warm_apps);
             a message comes in (client_app), goes to the process that has the model ready (work_socket, work_process)
             and is worked on under a memory cap (work)

and for both sides
flower_patches     all that is changed inside Flower, and why
app_bundle         the one bundle that runs: it names Strata's own apps and holds no code
app_processes      starts those apps, in place of Flower's SuperExec
environment        what every process we start is told
log_filter, output what the commands print

Only what trains or aggregates imports torch, and Flower is imported only where it is needed: a device's memory is for
training.
"""
