"""A fabric manager without hardware: appliances, blades, cables and regions, with faults."""
