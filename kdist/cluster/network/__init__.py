"""The network between tasks: interfaces, ports, probes of other tasks, time limits of connections, pages over HTTP."""
