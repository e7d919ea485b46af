"""What is open: leases, reservations, promotions, operations of tiers. Each ends once (law 2)."""
