"""What the services, the client and the launcher share: the wire below the protos, and the life of a process."""
