"""What two or more participants need: the bus, the journal, the service and tool runtimes, the model port."""
