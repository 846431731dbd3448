"""How many weights each row keeps: budgets, masks and the search for the best."""
