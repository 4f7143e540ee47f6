"""What ran: the attention report."""
