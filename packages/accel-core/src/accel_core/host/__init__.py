"""The machine around the process: environment, installed libraries, versions, affinity, ports."""
