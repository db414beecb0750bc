"""Composable CXL memory as a resource of Kubernetes: DRA driver, host agent, simulator."""
