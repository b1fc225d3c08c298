"""What a key may use: requests and tokens a minute, dollars a day and a month."""
