//! The OpenAPI description is complete and leads nowhere astray.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::api::description;

#[test]
fn the_description_is_whole() {
    let document = serde_json::to_value(description()).expect("json");
    assert!(document["openapi"].as_str().expect("version").starts_with("3.1"));
    let mut operations = BTreeSet::new();
    let mut references = Vec::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        assert!(path.starts_with("/v1/"), "{path}");
        for (method, operation) in item.as_object().expect("item") {
            let id = operation["operationId"].as_str().expect("id");
            assert!(operations.insert(id.to_owned()), "{id} twice");
            let said = operation["summary"].as_str().or(operation["description"].as_str());
            assert!(said.is_some_and(|said| !said.is_empty()), "{method} {path} says nothing");
            let responses = operation["responses"].as_object().expect("responses");
            assert!(responses.contains_key("default"), "{method} {path} never fails?");
            for (status, response) in responses {
                let bodiless = matches!(status.as_str(), "101" | "204");
                let content = response["content"].as_object();
                let described = content.is_some_and(|content| {
                    !content.is_empty() && content.values().all(|kind| kind["schema"].is_object())
                });
                assert!(described != bodiless, "{method} {path} {status}");
            }
        }
    }
    assert_eq!(operations.len(), 34);
    collect(&document, &mut references);
    assert!(!references.is_empty());
    for reference in references {
        let pointer = reference.strip_prefix('#').expect("local");
        assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
    }
}

fn collect(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
            map.values().for_each(|value| collect(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| collect(value, found)),
        _ => {}
    }
}
