"""The gRPC services of an agent: frames and requests in, events to the life, answers out. No decisions."""
