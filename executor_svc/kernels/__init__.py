"""Operations: `interface` says what a device offers, `reference` what each means, `cpu` how the CPU does it."""
