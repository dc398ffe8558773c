# A loop of curl: it knows two environment variables, and nothing of us.
messages=$(jq -n --arg text "$1" '[{role: "user", content: $text}]')
for turn in 1 2; do
  message=$(jq -n --argjson messages "$messages" '{model: "gpt-4o", messages: $messages}' |
    curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
      -H "Content-Type: application/json" -d @- | jq '.choices[0].message') || exit 1
  messages=$(jq -n --argjson messages "$messages" --argjson message "$message" \
    '$messages + [$message, {role: "user", content: "more"}]')
done
jq -nr --argjson message "$message" '$message.content'
