// A program that uses the HTTP client of Java's own library: prints the status and the body of a URL.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

class Fetch {
    public static void main(String[] words) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(words[0])).build();
        var response = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
        System.out.println(response.statusCode() + " " + response.body());
    }
}
