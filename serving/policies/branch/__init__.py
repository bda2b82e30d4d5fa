"""Whether a stage looks into its cache first."""
